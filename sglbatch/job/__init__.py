"""One batch job: rows to programs to backend to journal to output; identity, resume, signals, progress, report."""
