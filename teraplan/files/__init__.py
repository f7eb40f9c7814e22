"""Values as files that people read, edit and compare: versioned JSON, written whole or not at all.

`json_files` reads and checks any of them, field by field; the others say what theirs has.
"""
