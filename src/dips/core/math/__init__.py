"""The outer step and the codecs: for each one readable numpy reference and one compiled kernel of the same
signature."""
