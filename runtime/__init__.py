"""The only code that touches devices, streams, threads and files."""
