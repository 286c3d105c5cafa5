/* The sweeps of a round's close, over a range of blocks: whoever calls gives disjoint ranges to its threads.
 *
 * A "piece" is a tensor, or a part of one that starts at a multiple of BLOCK. Blocks are counted over all pieces.
 * Nothing is allocated but scratch, nothing global is written, and no result depends on how blocks are shared.
 */
#include <stdlib.h>

#include "formats.h"
#include "sorting.h"
#include "tree.h"

/* What a round is given: pieces of every learner's delta. Tables are [pieces] or [pieces][learners]. */
struct deltas {
    int64_t pieces, learners;
    const int64_t *elements;    /* of each piece */
    const int64_t *first_block; /* of each piece, and one more */
    const uint8_t *const *data; /* where each learner's piece begins */
    const uint8_t *const *scales;
    const int32_t *formats;
};

/* How the deltas of a piece become one, and where the sum of the merged goes. */
struct merging {
    const float *coefficients; /* [pieces][learners]; NULL: order statistics */
    const float *units;        /* [learners]: 1 / norm over the fragment, 0 for a delta of zeros */
    int64_t trim;              /* for order statistics: left out at each end */
    float *const *base; /* [pieces] */
};

/* What the outer step of a piece reads and writes. Where it keeps no master, `master_out` is scratch. */
struct stepping {
    const float *factors;       /* [pieces]: the merged delta is the base times this … */
    const uint8_t *has_factor;  /* … where there is one: 0 none, 1 this, 2 the merged delta is +0 */
    float learning_rate, momentum;
    int32_t is_final, commit; /* a format, or -1 */
    const int32_t *dtypes;    /* [pieces]: the anchor's */
    const uint8_t *const *master;      /* float32, or the old anchor where there is none yet */
    const int32_t *master_formats;
    const uint8_t *const *old_anchor;
    const uint8_t *const *momentum_in; /* float32 */
    float *const *master_out;          /* holds the base when called */
    float *const *momentum_out;
    uint8_t *const *anchor_out;
    uint8_t *const *update_out;
    uint8_t *const *update_scales;
    const int32_t *exponents; /* [pieces]: F8's, for its second sweep */
    uint8_t *flags;           /* [pieces], or-ed: what is not finite */
    uint32_t *largest;        /* [pieces]: F8's largest magnitude so far, as bits */
};

/* The sizes of these tables: the loader refuses a build whose idea of them is another. */
EXPORT int64_t deltapost_sizes(void) {
    return (int64_t)(sizeof(struct deltas) << 32 | sizeof(struct merging) << 16 | sizeof(struct stepping));
}

enum { BAD_MOMENTUM = 1, BAD_MASTER = 2, BAD_UPDATE = 4, BAD_ANCHOR = 8 };

/* Walks blocks: which piece a block is of, where in the piece it starts, and how many elements it has. */
struct place {
    int64_t piece, at;
    int count;
};

static struct place place_of(int64_t block, int64_t hint, int64_t pieces, const int64_t *first_block,
                             const int64_t *elements) {
    struct place found = {hint, 0, 0};
    while (found.piece + 1 < pieces && block >= first_block[found.piece + 1])
        found.piece++;
    found.at = (block - first_block[found.piece]) * BLOCK;
    int64_t left = elements[found.piece] - found.at;
    found.count = left < BLOCK ? (int)left : BLOCK;
    return found;
}

/* Elements of a learner's block from `from` on, padded with +0 to `size`. */
static void load(const struct deltas *deltas, struct place place, int64_t learner, int from, int size, float *out) {
    int64_t index = place.piece * deltas->learners + learner;
    int count = place.count - from < 0 ? 0 : place.count - from < size ? place.count - from : size;
    decode(deltas->formats[index], deltas->data[index], deltas->scales[index], place.at + from, count, size, out);
}

/* First sweep: sums[learner][block] = the tree of the delta with itself. */
EXPORT void deltapost_squares(const struct deltas *deltas, int64_t begin, int64_t end, float *sums,
                             int64_t stride) {
    float values[BLOCK];
    struct place place = {0, 0, 0};
    for (int64_t block = begin; block < end; block++) {
        place = place_of(block, place.piece, deltas->pieces, deltas->first_block, deltas->elements);
        for (int64_t learner = 0; learner < deltas->learners; learner++) {
            load(deltas, place, learner, 0, BLOCK, values);
            sums[learner * stride + block] = tree_dot(values, values);
        }
    }
}

/* Elements that are decoded and added at a time: what one learner adds to stays in the first cache. */
enum { CHUNK = 1024 };

static inline void add_scaled(float *restrict total, const float *restrict values, float coefficient, int is_first,
                              int count) {
    if (is_first)
        for (int i = 0; i < count; i++)
            total[i] = values[i] * coefficient;
    else
        for (int i = 0; i < count; i++)
            total[i] = total[i] + values[i] * coefficient;
}

static void add_both(float *restrict base, float *restrict unit, const float *restrict values, float coefficient,
                     float inverse) {
    for (int i = 0; i < CHUNK; i++) {
        base[i] = base[i] + values[i] * coefficient;
        unit[i] = unit[i] + values[i] * inverse;
    }
}

/* Learners whose decoded blocks are kept for the dots; of more, blocks are decoded twice and stay in cache. */
enum { KEPT = 12 };

/* Where a learner's decoded block goes: each has a place of its own, or all have one. */
static inline float *block_of(float *values, int64_t learners, int64_t learner) {
    return values + (learners <= KEPT ? learner * BLOCK : 0);
}

/* The weighted sum of a block, and the unit sum. Returns how many deltas are in the unit sum. */
static int combine(const struct deltas *deltas, const struct merging *merging, struct place place, float *values,
                   float *base, float *unit) {
    int64_t learners = deltas->learners;
    const float *coefficients = merging->coefficients + place.piece * learners;
    int units = 0;
    for (int from = 0; from < BLOCK; from += CHUNK) {
        units = 0;
        for (int64_t learner = 0; learner < learners; learner++) {
            float *mine = block_of(values, learners, learner) + from;
            float inverse = merging->units[learner];
            load(deltas, place, learner, from, CHUNK, mine);
            if (learner > 0 && units > 0 && inverse != 0.0f) {
                add_both(base + from, unit + from, mine, coefficients[learner], inverse);
                continue;
            }
            add_scaled(base + from, mine, coefficients[learner], learner == 0, CHUNK);
            if (inverse != 0.0f)
                add_scaled(unit + from, mine, inverse, units++ == 0, CHUNK);
        }
    }
    return units;
}

/* For each element of a block its sorted values without the `trim` lowest and highest, added in ascending order, and
 * the unit sum. Returns how many deltas are in the unit sum. */
static inline int middle(const struct deltas *deltas, const struct merging *merging, struct place place, float *values,
                         int32_t *keys, float *base, float *unit, int columns) {
    int64_t learners = deltas->learners;
    int units = 0;
    for (int from = 0; from < BLOCK; from += columns) {
        float *total = base + from;
        units = 0;
        for (int64_t learner = 0; learner < learners; learner++) {
            float *mine = block_of(values, learners, learner) + from;
            int32_t *row = keys + learner * columns;
            load(deltas, place, learner, from, columns, mine);
            for (int i = 0; i < columns; i++)
                row[i] = key_of(mine[i]);
            if (merging->units[learner] != 0.0f)
                add_scaled(unit + from, mine, merging->units[learner], units++ == 0, columns);
        }
        sort_columns(keys, learners, columns);
        for (int64_t row = merging->trim; row < learners - merging->trim; row++)
            for (int i = 0; i < columns; i++) {
                float value = value_of(keys[row * columns + i]);
                total[i] = row == merging->trim ? value : total[i] + value;
            }
    }
    return units;
}

/* Second sweep: the base of each piece, and by block: of[0] = base·base, of[1] = unit sum squared,
 * of[2 + learner] = delta·base. Returns -1 without memory. */
EXPORT int deltapost_merge(const struct deltas *deltas, const struct merging *merging, int64_t begin,
                           int64_t end, float *sums, int64_t stride) {
    int64_t learners = deltas->learners;
    int sorts = merging->coefficients == NULL, keeps = learners <= KEPT;
    float *values = malloc(sizeof(float) * BLOCK * (size_t)(keeps ? learners : 1) + 64);
    int32_t *keys = sorts ? malloc(sizeof(int32_t) * (size_t)(columns_for(learners) * learners)) : NULL;
    if (values == NULL || (sorts && keys == NULL)) {
        free(values);
        free(keys);
        return -1;
    }
    float base[BLOCK], unit[BLOCK];
    struct place place = {0, 0, 0};
    for (int64_t block = begin; block < end; block++) {
        place = place_of(block, place.piece, deltas->pieces, deltas->first_block, deltas->elements);
        int units;
        if (!sorts)
            units = combine(deltas, merging, place, values, base, unit);
        else if (columns_for(learners) == COLUMNS)
            units = middle(deltas, merging, place, values, keys, base, unit, COLUMNS);
        else
            units = middle(deltas, merging, place, values, keys, base, unit, FEW_COLUMNS);
        sums[block] = tree_dot(base, base);
        sums[stride + block] = units ? tree_dot(unit, unit) : 0.0f;
        for (int64_t learner = 0; learner < learners; learner++) {
            float *mine = block_of(values, learners, learner);
            if (!keeps)
                load(deltas, place, learner, 0, BLOCK, mine);
            sums[(2 + learner) * stride + block] = tree_dot(mine, base);
        }
        memcpy(merging->base[place.piece] + place.at, base, sizeof(float) * (size_t)place.count);
    }
    free(values);
    free(keys);
    return 0;
}

/* Block results in index order, added in float64 to what totals[piece][row] holds. */
EXPORT void deltapost_add_blocks(int64_t pieces, const int64_t *first_block, int64_t rows, const float *sums,
                                 int64_t stride, double *totals) {
    for (int64_t piece = 0; piece < pieces; piece++)
        for (int64_t row = 0; row < rows; row++) {
            double total = totals[piece * rows + row];
            for (int64_t block = first_block[piece]; block < first_block[piece + 1]; block++)
                total = total + (double)sums[row * stride + block];
            totals[piece * rows + row] = total;
        }
}

/* Anchor bytes of a block's values, and whether all are finite. */
static int write_anchor(int dtype, const float *values, int count, uint8_t *out, int64_t at) {
    switch (dtype) {
    case FORMAT_F16:
        encode_f16(values, count, out + 2 * at);
        break;
    case FORMAT_BF16:
        encode_bf16(values, count, out + 2 * at);
        break;
    default:
        encode_f32(values, count, out + 4 * at);
    }
    float again[BLOCK];
    decode(dtype, out, NULL, at, count, count, again);
    return any_non_finite(again, count);
}

/* The update of a block, its bytes written, and the anchor that follows it. Returns flags. */
static int publish(const struct stepping *to, struct place place, const float *old, const float *master) {
    float update[BLOCK], moved[BLOCK];
    int64_t piece = place.piece, at = place.at;
    uint8_t *out = to->update_out[piece], *scales = to->update_scales[piece];
    int bad = 0;
    for (int i = 0; i < place.count; i++)
        update[i] = master[i] - old[i];
    memset(update + place.count, 0, sizeof(float) * (size_t)(BLOCK - place.count));
    switch (to->commit) {
    case FORMAT_F32:
        encode_f32(update, place.count, out + 4 * at);
        break;
    case FORMAT_F16:
        encode_f16(update, place.count, out + 2 * at);
        break;
    case FORMAT_BF16:
        encode_bf16(update, place.count, out + 2 * at);
        break;
    case FORMAT_F8:
        encode_f8(update, place.count, to->exponents[piece], out + at);
        break;
    default:
        bad |= encode_f4(update, place.count, out + at / 2, scales + at / F4_BLOCK) ? BAD_UPDATE : 0;
    }
    decode(to->commit, out, scales, at, place.count, BLOCK, moved);
    if (to->commit != FORMAT_F4)
        bad |= any_non_finite(moved, place.count) ? BAD_UPDATE : 0;
    for (int i = 0; i < place.count; i++)
        moved[i] = old[i] + moved[i];
    bad |= write_anchor(to->dtypes[piece], moved, place.count, to->anchor_out[piece], at) ? BAD_ANCHOR : 0;
    return bad;
}

static void outer_step(const struct stepping *to, struct place place, const float *theta, float *master,
                       float *momentum) {
    int64_t piece = place.piece;
    float factor = to->factors[piece], lr = to->learning_rate, beta = to->momentum;
    if (to->has_factor[piece] == 2)
        memset(master, 0, sizeof(float) * (size_t)place.count);
    else if (to->has_factor[piece])
        for (int i = 0; i < place.count; i++)
            master[i] = master[i] * factor;
    if (to->is_final) {
        for (int i = 0; i < place.count; i++)
            master[i] = theta[i] - master[i];
        return;
    }
    for (int i = 0; i < place.count; i++) {
        float delta = master[i];
        float next = momentum[i] * beta + delta;
        momentum[i] = next;
        master[i] = theta[i] - (delta + next * beta) * lr;
    }
}

/* Third sweep: outer step, commit and anchor in one go. With an F8 commit it stops at the master, whose update's
 * largest magnitude it notes: `deltapost_publish` goes on once that is known for the whole tensor. */
EXPORT void deltapost_step(const struct deltas *deltas, const struct stepping *to, int64_t begin, int64_t end) {
    float theta[BLOCK], old[BLOCK], momentum[BLOCK];
    struct place place = {0, 0, 0};
    for (int64_t block = begin; block < end; block++) {
        place = place_of(block, place.piece, deltas->pieces, deltas->first_block, deltas->elements);
        int64_t piece = place.piece, at = place.at;
        float *master = to->master_out[piece] + at;
        int bad = 0;
        decode(to->master_formats[piece], to->master[piece], NULL, at, place.count, BLOCK, theta);
        memcpy(momentum, to->momentum_in[piece] + 4 * at, 4 * (size_t)place.count);
        outer_step(to, place, theta, master, momentum);
        memcpy(to->momentum_out[piece] + at, momentum, 4 * (size_t)place.count);
        if (!to->is_final)
            bad |= any_non_finite(momentum, place.count) ? BAD_MOMENTUM : 0;
        bad |= any_non_finite(master, place.count) ? BAD_MASTER : 0;
        if (to->commit < 0) {
            int lost = write_anchor(to->dtypes[piece], master, place.count, to->anchor_out[piece], at);
            bad |= lost && to->dtypes[piece] != FORMAT_F32 ? BAD_ANCHOR : 0;
        } else {
            decode(to->dtypes[piece], to->old_anchor[piece], NULL, at, place.count, BLOCK, old);
            if (to->commit == FORMAT_F8) {
                for (int i = 0; i < place.count; i++)
                    old[i] = master[i] - old[i];
                uint32_t largest = largest_bits(old, place.count);
                if (largest > to->largest[piece])
                    to->largest[piece] = largest;
            } else {
                bad |= publish(to, place, old, master);
            }
        }
        to->flags[piece] |= (uint8_t)bad;
    }
}

/* The rest of the third sweep of an F8 commit. */
EXPORT void deltapost_publish(const struct deltas *deltas, const struct stepping *to, int64_t begin,
                              int64_t end) {
    float old[BLOCK];
    struct place place = {0, 0, 0};
    for (int64_t block = begin; block < end; block++) {
        place = place_of(block, place.piece, deltas->pieces, deltas->first_block, deltas->elements);
        int64_t piece = place.piece;
        decode(to->dtypes[piece], to->old_anchor[piece], NULL, place.at, place.count, BLOCK, old);
        to->flags[piece] |= (uint8_t)publish(to, place, old, to->master_out[piece] + place.at);
    }
}
