/* SPDX-License-Identifier: Apache-2.0
 *
 * The C interface of sagebwd: the calls of sagebwd/attention.h and sagebwd/linear.h for C and for
 * other languages. C99, no dependencies.
 *
 *   sagebwd_forward_args a;
 *   sagebwd_forward_args_init(&a, sizeof a);
 *   a.q = sagebwd_contiguous(q, SAGEBWD_BF16, b, h, n, d);   ... k, v, o, lse ...
 *   size_t bytes;
 *   if (sagebwd_forward_workspace_size(&a, &bytes) != SAGEBWD_OK) puts(sagebwd_last_error());
 *   a.workspace = malloc(bytes); a.workspace_bytes = bytes;
 *   if (sagebwd_forward(&a) != SAGEBWD_OK) puts(sagebwd_last_error());
 *
 * Every call that can fail returns a status and validates its arguments before it writes anything.
 *
 * How the structs grow. New fields are appended, never moved. A caller compiled against an older,
 * shorter struct keeps working: fields beyond its `size` take their defaults. A longer struct than
 * the library knows is accepted as long as the unknown tail is zero, and refused otherwise.
 * `version` changes only if the meaning of an existing field does. Always fill a struct with its
 * _init function first; reserved fields stay zero.
 */
#ifndef SAGEBWD_SAGEBWD_H
#define SAGEBWD_SAGEBWD_H

#include <stddef.h>
#include <stdint.h>

#include "sagebwd/version.h"

#if defined(SAGEBWD_STATIC)
#define SAGEBWD_C_API
#else
#define SAGEBWD_C_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Value of the `version` field of every struct. */
#define SAGEBWD_STRUCT_VERSION 1

/* Status of a call. */
enum {
  SAGEBWD_OK = 0,
  SAGEBWD_INVALID_ARGUMENT = 1, /* the caller's argument is wrong; nothing was written */
  SAGEBWD_UNSUPPORTED =
      2, /* valid, but no implementation here can serve it; the message lists every refusal */
  SAGEBWD_INTERNAL = 3, /* a broken invariant of the library: please report it */
  SAGEBWD_OUT_OF_MEMORY = 4
};

enum { SAGEBWD_F32 = 0, SAGEBWD_BF16 = 1, SAGEBWD_F16 = 2 }; /* dtype */
enum { SAGEBWD_CPU = 0, SAGEBWD_CUDA = 1 };                  /* device */
enum { SAGEBWD_BOTTOM_RIGHT = 0, SAGEBWD_TOP_LEFT = 1 };     /* align */
enum { SAGEBWD_SCHEME_PAPER = 0, SAGEBWD_SCHEME_VECTORWISE = 1 };
enum { SAGEBWD_ROUND_NEAREST = 0, SAGEBWD_ROUND_DITHER = 1 }; /* rounding */
enum { SAGEBWD_FEATURES_SOFTMAX = 0 };                        /* phi */

/* The seven matmuls, as bits of sagebwd_recipe.high_precision. */
enum {
  SAGEBWD_MATMUL_S = 1 << 0,           /* S = QK^T in the forward */
  SAGEBWD_MATMUL_O = 1 << 1,           /* O = PV */
  SAGEBWD_MATMUL_S_RECOMPUTE = 1 << 2, /* S' = QK^T again in the backward */
  SAGEBWD_MATMUL_DV = 1 << 3,          /* dV = P^T dO */
  SAGEBWD_MATMUL_DP = 1 << 4, /* dP = dO V^T; never INT8. The bit forbids a 16-bit implementation */
  SAGEBWD_MATMUL_DQ = 1 << 5, /* dQ = dS K */
  SAGEBWD_MATMUL_DK = 1 << 6  /* dK = dS^T Q */
};

/* A strided tensor [batch, head, token, channel] the caller owns. Any layout is a choice of
 * strides; they count elements, are not negative, and stride[3] is 1. Zero repeats a tensor that is
 * read. A tensor that is written shares no memory with itself, with any other tensor of the call or
 * with the workspace; views that interleave, such as dq, dk and dv in one buffer, are fine. */
typedef struct sagebwd_tensor {
  void* data;
  int64_t shape[4];
  int64_t stride[4];
  int32_t dtype;
  int32_t reserved; /* 0 */
} sagebwd_tensor;

/* FP32 statistics with one value per query, [batch, head, token]. */
typedef struct sagebwd_stats {
  float* data;
  int64_t stride[3];
} sagebwd_stats;

/* Runs body(user, i) once for every i in [0, count), on any threads and in any order, and returns
 * when all are done. Missing items are SAGEBWD_INVALID_ARGUMENT, with results half written. */
typedef void (*sagebwd_parallel_for)(void* context, int64_t count,
                                     void (*body)(void* user, int64_t i), void* user);

/* Which values share a quantisation scale, and every switch that changes the numbers:
 * sagebwd/recipe.h explains each. */
typedef struct sagebwd_recipe {
  size_t size;
  uint32_t version;
  int32_t scheme;
  int32_t tile_q; /* a multiple of 64 up to 256; 0: the backend's own choice */
  int32_t tile_k; /* likewise */
  int32_t smooth_k;
  int32_t smooth_q;
  int32_t reserved_4; /* 0 */
  int32_t rounding;
  uint64_t seed;
  int32_t reserved; /* 0 */
  uint32_t high_precision;
  int32_t reserved_2; /* 0 */
  uint32_t dithered;  /* with SAGEBWD_ROUND_DITHER: bits of O, dV, dQ, dK; 0: all of them */
  int32_t rotate;
  int32_t reserved_3; /* 0 */
} sagebwd_recipe;

/* Block-sparse attention: the key blocks that each block of queries sees. BlockLists in
 * sagebwd/attention.h explains each field. */
typedef struct sagebwd_block_lists {
  size_t size;
  uint32_t version;
  int32_t lead;          /* leading entries of each row whose P is not quantised; -1: all. 1 is
                            what C++ and Python take by default */
  const int32_t* index;  /* key blocks, best first */
  const int32_t* count;  /* entries in use of each row; NULL: width */
  const int64_t* offset; /* where each row starts, and the last one ends; NULL: rows of width */
  int64_t width;
  int64_t rows;         /* per head; 0: no lists */
  int64_t stride_batch; /* in rows; 0: shared */
  int64_t stride_head;
  int32_t block_q; /* tokens, multiples of 64 */
  int32_t block_k;
  int32_t on_device; /* 1: the arrays are CUDA memory */
  int32_t reserved;  /* 0 */
} sagebwd_block_lists;

typedef struct sagebwd_forward_args {
  size_t size;
  uint32_t version;
  int32_t device;
  sagebwd_tensor q;  /* [b, h,  nq, d] */
  sagebwd_tensor k;  /* [b, hk, nk, d], h a multiple of hk */
  sagebwd_tensor v;  /* [b, hk, nk, dv]; dv may be smaller or larger than d */
  sagebwd_tensor o;  /* [b, h,  nq, dv], written */
  sagebwd_stats lse; /* [b, h, nq], written: natural log of the true scaled logits; -inf where no
                        key is visible */
  /* Optional from here on. */
  const sagebwd_recipe* recipe; /* NULL: vectorwise */
  float scale;                  /* of the logits; 0: 1/sqrt(d) */
  int32_t causal;               /* 0 or 1 */
  int32_t align;                /* of the causal diagonal and the window */
  int32_t reserved;             /* 0 */
  int64_t window_left;          /* -1: open */
  int64_t window_right;
  const int32_t* cu_q; /* packed batch, b = 1: document t holds queries cu_q[t] ... cu_q[t+1]-1 */
  const int32_t* cu_k;
  int64_t num_documents; /* 0: not packed; else cu_q and cu_k have num_documents + 1 entries */
  void* workspace;       /* of any alignment */
  size_t workspace_bytes;
  sagebwd_parallel_for parallel_for; /* NULL: the library's own threads, fewer where the system
                                        refuses some */
  void* parallel_context;
  void* stream;         /* cudaStream_t for SAGEBWD_CUDA */
  float* max_logit;     /* NULL, or [b, h] ([num_documents, h] when packed), written: largest true
                           scaled logit */
  int32_t cu_on_device; /* 1: cu_q and cu_k are CUDA memory, see Documents in attention.h */
  int32_t reserved_2;   /* 0 */
  void* codes; /* NULL, or sagebwd_codes_size bytes that start at a multiple of 16, written:
                  the quantised inputs, for a backward that takes them instead of q, k, v */
  size_t codes_bytes;
  const sagebwd_block_lists* blocks; /* NULL: every key block is seen */
  float softcap;      /* a logit x becomes softcap*tanh(x/softcap); 0: it stays x. lse and max_logit
                         are of the capped logits */
  int32_t reserved_3; /* 0 */
} sagebwd_forward_args;

typedef struct sagebwd_backward_args {
  size_t size;
  uint32_t version;
  int32_t device;
  sagebwd_tensor q; /* q ... lse as in the forward, o and lse as it wrote them */
  sagebwd_tensor k;
  sagebwd_tensor v;
  sagebwd_tensor o;
  sagebwd_stats lse;
  sagebwd_tensor dout; /* [b, h,  nq, dv] */
  sagebwd_tensor dq;   /* [b, h,  nq, d], written */
  sagebwd_tensor dk;   /* [b, hk, nk, d], written */
  sagebwd_tensor dv;   /* [b, hk, nk, dv], written */
  /* Optional from here on. */
  const sagebwd_recipe* recipe;
  float scale;
  int32_t causal;
  int32_t align;
  int32_t partial_kv; /* 1: k and v are part of the keys and lse is of all of them (a ring step) */
  int64_t window_left;
  int64_t window_right;
  const int32_t* cu_q;
  const int32_t* cu_k;
  int64_t num_documents;
  void* workspace;
  size_t workspace_bytes;
  sagebwd_parallel_for parallel_for;
  void* parallel_context;
  void* stream;
  sagebwd_stats dlse;    /* gradient of lse; data NULL: none */
  int32_t deterministic; /* 1: dQ bit-equal from run to run; always so on a CPU */
  int32_t reserved;      /* 0 */
  int32_t cu_on_device;  /* as in the forward */
  int32_t reserved_2;    /* 0 */
  void* codes; /* NULL, or what the forward wrote: the data of q, k and v is then not looked
                  at, and the gradients have the same bits */
  size_t codes_bytes;
  const sagebwd_block_lists* blocks; /* as in the forward */
  float softcap;                     /* as in the forward */
  int32_t reserved_3;                /* 0 */
} sagebwd_backward_args;

/* The linear branch: each block of queries sees the key blocks that its list does not have.
 * sagebwd/linear.h has the formulas. */
typedef struct sagebwd_linear_forward_args {
  size_t size;
  uint32_t version;
  int32_t device;
  sagebwd_tensor q; /* [b, h,  nq, d] */
  sagebwd_tensor k; /* [b, hk, nk, d], h a multiple of hk */
  sagebwd_tensor v; /* [b, hk, nk, d] */
  sagebwd_tensor o; /* [b, h,  nq, d], written; 0 where no key is left */
  /* Optional from here on. */
  const sagebwd_block_lists* excluded; /* NULL: every key block is seen */
  int32_t phi;                         /* the feature map */
  int32_t mean_free_keys;              /* 1, the default: phi gets K minus its mean */
  void* workspace;                     /* of any alignment */
  size_t workspace_bytes;
  sagebwd_parallel_for parallel_for; /* NULL: the library's own threads */
  void* parallel_context;
  void* stream;       /* cudaStream_t for SAGEBWD_CUDA */
  sagebwd_stats norm; /* [b, h, nq], written: what o was divided by; data NULL: not asked for */
} sagebwd_linear_forward_args;

typedef struct sagebwd_linear_backward_args {
  size_t size;
  uint32_t version;
  int32_t device;
  sagebwd_tensor q; /* q ... v as in the forward */
  sagebwd_tensor k;
  sagebwd_tensor v;
  sagebwd_tensor dout; /* [b, h,  nq, d] */
  sagebwd_tensor dq;   /* [b, h,  nq, d], written */
  sagebwd_tensor dk;   /* [b, hk, nk, d], written */
  sagebwd_tensor dv;   /* [b, hk, nk, d], written */
  /* Optional from here on; as in the forward. */
  const sagebwd_block_lists* excluded;
  int32_t phi;
  int32_t mean_free_keys;
  void* workspace;
  size_t workspace_bytes;
  sagebwd_parallel_for parallel_for;
  void* parallel_context;
  void* stream;
  sagebwd_stats dnorm; /* gradient of norm; data NULL: none */
} sagebwd_linear_backward_args;

/* "0.1.0": of the library that is loaded. SAGEBWD_VERSION_STRING is of this header. */
SAGEBWD_C_API const char* sagebwd_version(void);

/* Why the last failing call of this thread failed; "" if none has. Valid until the next failing
 * call of the thread. */
SAGEBWD_C_API const char* sagebwd_last_error(void);

/* Fill a struct with size, version and defaults. `size` is sizeof the caller's struct. */
SAGEBWD_C_API int sagebwd_recipe_init(sagebwd_recipe* recipe, size_t size,
                                      const char* text); /* "paper", "vectorwise smooth_k=off" */
SAGEBWD_C_API int sagebwd_block_lists_init(sagebwd_block_lists* lists, size_t size);
SAGEBWD_C_API int sagebwd_forward_args_init(sagebwd_forward_args* args, size_t size);
SAGEBWD_C_API int sagebwd_backward_args_init(sagebwd_backward_args* args, size_t size);
SAGEBWD_C_API int sagebwd_linear_forward_args_init(sagebwd_linear_forward_args* args, size_t size);
SAGEBWD_C_API int sagebwd_linear_backward_args_init(sagebwd_linear_backward_args* args,
                                                    size_t size);

/* Bytes of workspace the call needs. Neither the workspace fields nor the data pointers are looked
 * at. */
SAGEBWD_C_API int sagebwd_forward_workspace_size(const sagebwd_forward_args* args, size_t* bytes);
SAGEBWD_C_API int sagebwd_backward_workspace_size(const sagebwd_backward_args* args, size_t* bytes);
SAGEBWD_C_API int sagebwd_linear_forward_workspace_size(const sagebwd_linear_forward_args* args,
                                                        size_t* bytes);
SAGEBWD_C_API int sagebwd_linear_backward_workspace_size(const sagebwd_linear_backward_args* args,
                                                         size_t* bytes);

/* Bytes of codes, about 3 per channel and token. Refuses a recipe whose codes do not stand for its
 * inputs: "paper", matmuls other than dV and dP out of INT8. */
SAGEBWD_C_API int sagebwd_codes_size(const sagebwd_forward_args* args, size_t* bytes);

SAGEBWD_C_API int sagebwd_forward(const sagebwd_forward_args* args);
SAGEBWD_C_API int sagebwd_backward(const sagebwd_backward_args* args);
SAGEBWD_C_API int sagebwd_linear_forward(const sagebwd_linear_forward_args* args);
SAGEBWD_C_API int sagebwd_linear_backward(const sagebwd_linear_backward_args* args);

/* One line per implementation, best first: which one would run, and why the others would not. Like
 * snprintf: writes at most `capacity` bytes with the closing zero, and `length` (may be NULL)
 * receives the length of the whole text. */
SAGEBWD_C_API int sagebwd_explain_forward(const sagebwd_forward_args* args, char* text,
                                          size_t capacity, size_t* length);
SAGEBWD_C_API int sagebwd_explain_backward(const sagebwd_backward_args* args, char* text,
                                           size_t capacity, size_t* length);

/* A contiguous [b, h, n, d] tensor. */
static inline sagebwd_tensor sagebwd_contiguous(void* data, int32_t dtype, int64_t b, int64_t h,
                                                int64_t n, int64_t d) {
  const sagebwd_tensor t = {data, {b, h, n, d}, {h * n * d, n * d, d, 1}, dtype, 0};
  return t;
}

/* Contiguous [b, h, n] statistics. */
static inline sagebwd_stats sagebwd_contiguous_stats(float* data, int64_t h, int64_t n) {
  const sagebwd_stats s = {data, {h * n, n, 1}};
  return s;
}

#ifdef __cplusplus
}
#endif

#endif
