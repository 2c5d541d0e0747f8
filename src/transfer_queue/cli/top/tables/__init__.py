"""The tables of `tq top`: their columns, their cells and colors, and the widget that draws them."""
