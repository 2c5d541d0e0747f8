"""The screens of `tq top`."""
