"""The modes of attention: a module each, with all that the mode changes in a call. docs/adding-a-mode.md adds one."""
