"""Tables in, predictions with error bars out: estimators, files and the command line.

The modules here need scikit-learn, and `files`, `schema` and `cli` need pandas; so this package
imports none of them by itself.
"""
