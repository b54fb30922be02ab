"""What `burst report` shows: runs in groups, compared with one another, with a baseline and with published figures.

build.py     runs on disk -> `Report`, a plain value        options.py, request.py   what was typed
writers: table.py text.py (Markdown, CSV) latex.py html.py (plots in it: panels.py -> draw.py -> svg.py) picture.py
"""
