"""What `burst report` shows: runs in groups, compared with one another and with a baseline.

report.py -> Request -> build.py -> Report -> write.py: tables, Markdown, CSV, LaTeX, page.html
    records.py: what the files of a run say    columns.py: every figure, how it reads, which end of it is better
    against.py: baselines, gates    compare.py, bootstrap.py: A against B
    panels.py: what is drawn    draw.py: drawn with matplotlib
"""
