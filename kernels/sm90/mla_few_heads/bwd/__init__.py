"""The backward kernel."""
