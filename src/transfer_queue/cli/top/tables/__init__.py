"""The tables of `tq top`: their columns, their cells and colours, and the widget that draws them."""
