"""`vua ui`: a cache as a local web page. Reads, and changes nothing."""
