"""tutti: from one device to many, with proof and with an account of the speed lost on the way.

Importing this package imports neither torch nor any of its rooms: names are fetched when used.
"""
