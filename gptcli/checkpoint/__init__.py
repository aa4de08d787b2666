"""What lies on disk. Headers are read without torch; one module a file format; bind.py joins a file to a layout."""
