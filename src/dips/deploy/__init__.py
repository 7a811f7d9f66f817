"""A run on Kubernetes clusters in several places: one file in, objects, a comparison and a rollout out.

What is made of the file, and what is done about a difference, is decided by pure functions; `kubernetes_api.py`
alone imports the client of Kubernetes, so that a plan needs neither it nor a cluster.
"""
