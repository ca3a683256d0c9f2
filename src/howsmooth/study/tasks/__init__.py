"""The kinds of work that a study is made of: each says what is left to do, and makes rows of data."""
