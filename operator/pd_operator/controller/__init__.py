"""The controller runtime: keys come in from watches, a workqueue orders them, workers reconcile them."""
