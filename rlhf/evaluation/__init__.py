"""Measuring policies and reward models."""
