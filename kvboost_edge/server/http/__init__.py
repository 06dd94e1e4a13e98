"""HTTP: protocol and deadlines, hosts, API keys, headers, static files of the web page."""
