"""The canary that finds corrupted answers: what is asked, against which reference, and how it is
judged.
"""
