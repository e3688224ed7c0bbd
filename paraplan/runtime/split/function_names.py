"""Names of torch functions, by what they do to the parts of a split tensor."""

from __future__ import annotations

ELEMENTWISE = frozenset(
    {
        *("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "rsub", "radd", "rmul", "neg"),
        *("true_divide", "divide", "multiply", "subtract", "pow", "square", "sqrt", "rsqrt", "exp", "log", "abs"),
        *("__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__", "__imul__"),
        *("__truediv__", "__rtruediv__", "__itruediv__", "__pow__", "__rpow__", "__neg__", "sin", "cos", "erf"),
        *("tanh", "sigmoid", "relu", "relu_", "silu", "gelu", "mish", "softplus", "elu", "leaky_relu", "hardtanh"),
        *("relu6", "logsigmoid", "threshold", "maximum", "minimum", "lerp", "where", "masked_fill", "masked_fill_"),
        *("copy_", "addcmul", "addcdiv", "clamp", "clamp_min", "clamp_max", "nan_to_num"),
        *("dropout", "alpha_dropout", "feature_alpha_dropout", "to", "float", "half", "double", "bfloat16", "type"),
        *("type_as", "contiguous", "clone", "detach", "logical_not", "logical_and", "logical_or", "eq", "ne", "lt"),
        *("le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__and__", "__or__"),
    }
)
"""The result has the shape and the split of the (only) split operand, and other operands broadcast against it."""

LAST_DIMENSIONS = frozenset({"layer_norm", "rms_norm"})
"""They work along the last dimensions, whose sizes they name."""

ALONG = frozenset({"softmax", "log_softmax", "cumsum", "cumprod", "normalize", "sort", "argsort", "flip", "softmin"})
"""They keep shapes, and work along a dimension."""

IN_PLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"})
"""They write into their first operand, beside those whose names end in `_`."""

OF_THE_WHOLE = frozenset(
    {
        *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__", "dtype", "device", "layout"),
        *("is_floating_point", "is_complex", "is_cuda", "is_meta", "is_cpu", "is_sparse", "is_nested", "is_quantized"),
        *("is_mps", "is_xpu", "element_size", "itemsize", "get_device", "names"),
    }
)
"""They answer for the whole tensor."""

OF_THE_PART = frozenset(
    {
        *("requires_grad", "grad_fn", "is_leaf", "retains_grad", "stride", "is_contiguous", "storage_offset"),
        *("register_hook", "new_zeros", "new_ones", "new_full", "new_tensor", "_version", "is_inference"),
    }
)
"""They answer for the part, or make tensors that are whole."""
