"""The commands about single samples: `tq show` and `tq stuck`."""
