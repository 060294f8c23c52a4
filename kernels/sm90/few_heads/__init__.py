"""The same for few heads whose keys differ from query to query: kernel.py, and what serves it alone."""
