"""What `burst report` shows: runs in groups, and two compared with one another.

report.py -> build.py -> Report -> write.py: tables, CSV, page.html
    records.py, effective.py: what the files of a run say    columns.py: every figure, and how it reads
    compare.py, bootstrap.py: A against B    plots.py: what is drawn, with matplotlib
"""
