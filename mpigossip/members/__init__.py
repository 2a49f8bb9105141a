"""Training in a folder that members join and leave: files and records, claims, protocol, models.

The folder contains these files, besides temporary files, logs and the result:

    job.toml or loop.toml     job and versions that all members share
    places/000007             place of a member; numbers are never used again
    chain/000007/000042       rounds of a place in order, followed by one closing record
    ledger/0000/000012.1      claims of chunks: second claim to block 12
    models/000007-….h5        newest models of a place
    closed/000007.000345      empty: place 7 is closed, and the age of its newest model is 345
    END                       versions whose average is the result

Each record is published once, with its whole content, by link(2), and never changes. A model is
written under a name that nobody can guess, and a record then names it.
"""
