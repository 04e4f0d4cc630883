"""The paper's equations in plain Python, on lists of floats: no torch, no broadcasting, no batch.

A matrix is a list of rows. Weights come as a dictionary of nested lists under the model's names,
where a linear layer holds its matrix as [outputs][inputs].
"""

import itertools
import math

# parameters that follow from the sizes of Table 3 and 37,000 tokens, in millions
PARAMETERS = {
    "base": 63.05,
    "big": 214.17,
    "B1": 55.97,
    "B2": 58.33,
    "C1": 33.64,
    "C2": 48.35,
    "C3": 77.75,
    "C4": 26.82,
    "C5": 163.82,
    "C6": 50.45,
    "C7": 88.24,
}


def matmul(a, b):
    return [[sum(x * y for x, y in zip(row, column)) for column in zip(*b)] for row in a]


def transpose(a):
    return [list(column) for column in zip(*a)]


def softmax(row):
    highest = max(row)
    powers = [math.exp(x - highest) for x in row]
    return [x / sum(powers) for x in powers]


def attention(query, key, value, hidden=lambda q, k: False):
    """Equation (1); `hidden(q, k)` is true if position q must not attend to position k."""
    d_k = len(query[0])
    weights = []
    for q, row in enumerate(matmul(query, transpose(key))):
        scores = [-math.inf if hidden(q, k) else x / math.sqrt(d_k) for k, x in enumerate(row)]
        weights.append(softmax(scores))
    return matmul(weights, value)


def linear(x, weights, name):
    bias = weights.get(f"{name}.bias")
    y = matmul(x, transpose(weights[f"{name}.weight"]))
    return y if bias is None else [[a + b for a, b in zip(row, bias)] for row in y]


def multi_head_attention(x, memory, weights, name, num_heads, hidden=lambda q, k: False):
    """Section 3.2.2: head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V), concatenated, times W^O."""
    projected = [
        linear(source, weights, f"{name}.{part}_proj")
        for source, part in ((x, "q"), (memory, "k"), (memory, "v"))
    ]
    heads = []
    for head in range(num_heads):
        parts = []
        for matrix in projected:
            width = len(matrix[0]) // num_heads
            parts.append([row[head * width : (head + 1) * width] for row in matrix])
        heads.append(attention(*parts, hidden))
    concatenated = [list(itertools.chain(*rows)) for rows in zip(*heads)]
    return linear(concatenated, weights, f"{name}.out_proj")


def feed_forward(x, weights, name):
    """Equation (2)."""
    inner = [[max(0.0, a) for a in row] for row in linear(x, weights, f"{name}.fc1")]
    return linear(inner, weights, f"{name}.fc2")


def layer_norm(x, weights, name, epsilon=1e-5):
    scale, shift = weights[f"{name}.weight"], weights[f"{name}.bias"]
    normed = []
    for row in x:
        mean = sum(row) / len(row)
        variance = sum((a - mean) ** 2 for a in row) / len(row)
        normed.append(
            [
                (a - mean) / math.sqrt(variance + epsilon) * s + b
                for a, s, b in zip(row, scale, shift)
            ]
        )
    return normed


def add(x, y):
    return [[a + b for a, b in zip(left, right)] for left, right in zip(x, y)]


def positional_encoding(position, d_model, base=10000):
    """Section 3.5: sin at feature 2i, cos at 2i + 1, of position / base^(2i / d_model)."""
    row = []
    for feature in range(d_model):
        angle = position / base ** (2 * (feature // 2) / d_model)
        row.append(math.cos(angle) if feature % 2 else math.sin(angle))
    return row


def embed(tokens, weights):
    table = weights["model.encoder.embed_tokens.weight"]
    d_model = len(table[0])
    return [
        [a * math.sqrt(d_model) + b for a, b in zip(table[token], positional_encoding(i, d_model))]
        for i, token in enumerate(tokens)
    ]


def is_later(query, key):
    return key > query


def encode(tokens, weights, num_layers, num_heads):
    """Left half of figure 1: source tokens to memory."""
    x = embed(tokens, weights)
    for i in range(num_layers):
        layer = f"model.encoder.layers.{i}"
        attended = multi_head_attention(x, x, weights, f"{layer}.self_attention", num_heads)
        x = layer_norm(add(x, attended), weights, f"{layer}.self_attention_norm")
        x = layer_norm(
            add(x, feed_forward(x, weights, f"{layer}.feed_forward")),
            weights,
            f"{layer}.feed_forward_norm",
        )
    return x


def logits(source, target, weights, num_layers, num_heads):
    """Figure 1: logits of the token after each target token, [T][V]."""
    memory = encode(source, weights, num_layers, num_heads)
    x = embed(target, weights)
    for i in range(num_layers):
        layer = f"model.decoder.layers.{i}"
        attended = multi_head_attention(
            x, x, weights, f"{layer}.self_attention", num_heads, is_later
        )
        x = layer_norm(add(x, attended), weights, f"{layer}.self_attention_norm")
        attended = multi_head_attention(x, memory, weights, f"{layer}.cross_attention", num_heads)
        x = layer_norm(add(x, attended), weights, f"{layer}.cross_attention_norm")
        x = layer_norm(
            add(x, feed_forward(x, weights, f"{layer}.feed_forward")),
            weights,
            f"{layer}.feed_forward_norm",
        )
    return matmul(x, transpose(weights["model.encoder.embed_tokens.weight"]))


def log_softmax(row):
    highest = max(row)
    total = highest + math.log(sum(math.exp(x - highest) for x in row))
    return [x - total for x in row]


def length_penalty(length, alpha):
    return ((5 + length) / 6) ** alpha


def exhaustive_search(next_log_probs, num_tokens, end_token, max_length, alpha):
    """Return every complete sentence of at most `max_length` tokens with its score, best first.

    `next_log_probs(tokens)` returns the log-probability of each next token.
    """
    found, open_ones = [], [([], 0.0)]
    for length in range(1, max_length + 1):
        longer = []
        for tokens, log_prob in open_ones:
            row = next_log_probs(tokens)
            for token in range(num_tokens):
                total = log_prob + row[token]
                if token == end_token:
                    found.append(([*tokens, token], total / length_penalty(length, alpha)))
                else:
                    longer.append(([*tokens, token], total))
        open_ones = longer
    return sorted(found, key=lambda hypothesis: -hypothesis[1])


def learning_rate(step, d_model, warmup_steps):
    """Equation (3)."""
    return d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)
