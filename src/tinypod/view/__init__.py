"""The page of `tinypod view`: a server on this machine only, and the files that it serves."""
