"""A parameter server: processes that own the parameters, workers that only compute gradients.

    worker 0 ---- next, commit ---->  coordinator (in the launcher): who does which samples, which pushes make
    worker 1 ----                     which update, who is alive, who is in which chain
       |  push, pull                       |  measure, squares, apply n
       v                                   v
    shard 0:  head -> ... -> tail      each replica holds the shard's parameters and optimizer state
    shard 1:  head -> ... -> tail      and applies update n itself, in the same arithmetic

A gradient counts once its parts are stored on every replica of every shard and the coordinator has accepted it; the
coordinator puts accepted gradients in one order, the same for all shards, so an update is on all shards or on none.
"""
