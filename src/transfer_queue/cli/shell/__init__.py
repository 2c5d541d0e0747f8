"""What commands share with the shell: styles and widths of the terminal, JSON for scripts, and completion."""
