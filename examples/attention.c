/* SPDX-License-Identifier: Apache-2.0
 * Forward and backward from C: a packed batch of three documents in a [token, head, channel]
 * layout.
 *
 *   cc -std=c99 attention.c $(pkg-config --cflags --libs sagebwd) -lm && ./a.out
 *
 * If ./a.out does not find libsagebwd.so, add -Wl,-rpath,$(pkg-config --variable=libdir sagebwd).
 */
#include <math.h>
#include <sagebwd/sagebwd.h>
#include <stdio.h>
#include <stdlib.h>

enum { kHeads = 4, kTokens = 300, kDim = 64, kCount = kTokens * kHeads * kDim };

static float q[kCount], k[kCount], v[kCount], o[kCount], dout[kCount], dq[kCount], dk[kCount],
    dv[kCount];
static float lse[kHeads * kTokens];

static void fill(float* x, unsigned seed) {
  for (int i = 0; i < kCount; ++i) {
    seed = seed * 1664525u + 1013904223u;
    x[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
  }
}

/* Tokens first, then heads: only the strides say so. */
static sagebwd_tensor packed(float* data) {
  const sagebwd_tensor t = {
      data, {1, kHeads, kTokens, kDim}, {kCount, kDim, kHeads * kDim, 1}, SAGEBWD_F32, 0};
  return t;
}

static int check(int status, const char* what) {
  if (status != SAGEBWD_OK) fprintf(stderr, "%s: %s\n", what, sagebwd_last_error());
  return status == SAGEBWD_OK;
}

int main(void) {
  const int32_t offsets[] = {0, 120, 120, 300}; /* the second document is empty */
  fill(q, 1), fill(k, 2), fill(v, 3), fill(dout, 4);

  sagebwd_recipe recipe;
  sagebwd_forward_args f;
  sagebwd_backward_args g;
  if (!check(sagebwd_recipe_init(&recipe, sizeof recipe, "vectorwise"), "recipe")) return 1;
  if (!check(sagebwd_forward_args_init(&f, sizeof f), "forward args")) return 1;
  if (!check(sagebwd_backward_args_init(&g, sizeof g), "backward args")) return 1;

  f.q = g.q = packed(q), f.k = g.k = packed(k), f.v = g.v = packed(v), f.o = g.o = packed(o);
  f.lse = g.lse = sagebwd_contiguous_stats(lse, kHeads, kTokens);
  f.causal = g.causal = 1;
  f.cu_q = f.cu_k = g.cu_q = g.cu_k = offsets;
  f.num_documents = g.num_documents = 3;
  f.recipe = g.recipe = &recipe;
  g.dout = packed(dout), g.dq = packed(dq), g.dk = packed(dk), g.dv = packed(dv);

  size_t forward_bytes = 0, backward_bytes = 0;
  if (!check(sagebwd_forward_workspace_size(&f, &forward_bytes), "forward workspace")) return 1;
  if (!check(sagebwd_backward_workspace_size(&g, &backward_bytes), "backward workspace")) return 1;
  const size_t bytes = forward_bytes > backward_bytes ? forward_bytes : backward_bytes;
  f.workspace = g.workspace = malloc(bytes);
  f.workspace_bytes = g.workspace_bytes = bytes;

  char text[1024];
  if (!check(sagebwd_explain_backward(&g, text, sizeof text, NULL), "explain")) return 1;
  printf("sagebwd %s\n%s", sagebwd_version(), text);
  const int ok = check(sagebwd_forward(&f), "forward") && check(sagebwd_backward(&g), "backward");
  free(f.workspace);
  if (!ok) return 1;

  /* The first token of a document sees only itself: there O is V, rounded to its INT8 code, and
     dQ = 0. */
  const int first[] = {offsets[0], offsets[2]};
  double worst_o = 0, worst_dq = 0;
  for (int t = 0; t < 2; ++t)
    for (int i = first[t] * kHeads * kDim; i < (first[t] + 1) * kHeads * kDim; ++i) {
      worst_o = fmax(worst_o, fabs((double)o[i] - v[i]));
      worst_dq = fmax(worst_dq, fabs((double)dq[i]));
    }
  printf("at a document's first token: |O - V| <= %.2g, |dQ| <= %.2g\n", worst_o, worst_dq);
  return worst_o < 1e-2 && worst_dq < 1e-3 ? 0 : 1;
}
