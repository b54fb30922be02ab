"""What runs on the nodes while an image is brought there: standard library of Python 3.9 only, sent over stdin."""
