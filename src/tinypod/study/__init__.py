"""`tinypod study`: whole studies."""
