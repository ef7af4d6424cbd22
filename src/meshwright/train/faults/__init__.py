"""Fault injection: what a job's ``[fault]`` asks for happens at its address, once; without it none of this loads."""
