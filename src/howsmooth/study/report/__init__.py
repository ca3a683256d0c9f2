"""Write the HTML report of a study, from its store alone, as one file without external resources.

``page`` assembles the report. ``chart_data`` writes the numbers for its script, ``tables`` the tables and
headlines.
"""
