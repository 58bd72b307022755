"""The whole job as one radix tree, before it runs: order, what can be shared, what it will take."""

from sglbatch.planner.calls import JobFacts, plan_calls
from sglbatch.planner.estimate import kv_bytes_per_token
from sglbatch.planner.order import depth_first_order
from sglbatch.planner.plan import Plan, make_plan
from sglbatch.planner.render import counted, escape_controls, render_summary, shorten
from sglbatch.planner.slabs import cut_slabs, slab_order
from sglbatch.planner.summary import Summary
from sglbatch.planner.tree import Tree, TreeNode, top_of_tree

__all__ = [
    "JobFacts",
    "Plan",
    "Summary",
    "Tree",
    "TreeNode",
    "counted",
    "cut_slabs",
    "depth_first_order",
    "escape_controls",
    "kv_bytes_per_token",
    "make_plan",
    "plan_calls",
    "render_summary",
    "shorten",
    "slab_order",
    "top_of_tree",
]
