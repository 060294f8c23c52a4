"""The public ops: each checks its operands and says what every query sees; `_dispatch` does the rest."""
