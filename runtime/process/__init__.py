"""This process: its memory, pages, threads and locks, as Linux tells of them."""
