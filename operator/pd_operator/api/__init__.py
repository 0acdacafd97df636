"""The two kinds of pdserve.dev/v1alpha1: models, conditions and reasons, CRD generation."""
