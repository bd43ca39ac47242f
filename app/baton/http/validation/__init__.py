"""Check what a request asks for, before an engine sees it."""
