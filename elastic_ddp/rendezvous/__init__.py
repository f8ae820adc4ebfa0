"""Membership: who trains together, and how they find out."""
