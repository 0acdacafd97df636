"""Discrete-event simulator of P/D serving that runs the operator's own scaling law against peers' policies."""
