"""Reading recorded workloads: CSV, JSON lines, one long JSON array.

Files come from elsewhere and are not trusted: every field is checked, and what is wrong is a
`ValueError` that names file, line, field and value.
"""
