"""HTTP itself: the protocol with its deadlines, hosts, keys, headers, and the web page's files."""
