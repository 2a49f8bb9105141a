"""Training in a folder that members join and leave: files and records, claims, protocol, models.

    job.toml                  the job and the versions that all members share
    places/000007             a member; numbers are never used again
    chain/000007/000042       its rounds in order, then one closing record
    ledger/0000/000012.1      claims of chunks: block 12, second attempt
    models/000007-….h5        its newest models
    closed/000007.000345      hints: this place is closed, its newest model is that old
    END                       the versions whose average is the result

Every name is written once, whole, by link(2), and never changes.
"""
