"""What runs on the nodes while an image is brought there: standard library of Python 3.6 only, sent over stdin."""
