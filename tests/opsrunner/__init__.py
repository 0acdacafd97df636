"""The operator as a test sees it: a real process, its API calls, what it made, and waits that say what they waited for."""
