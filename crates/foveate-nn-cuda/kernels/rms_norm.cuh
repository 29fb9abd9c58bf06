// What the backward passes of RMSNorm share, a CTA or a warp a row.

constexpr int HELD = FV_HELD;

struct RmsNormBackwardParams {
    Rows x, d_out, d_x, again;      // what the forward gave, once more: nobody asks where its data is null
    u64 weight, inverse;
    u64 partial;                    // f32 [parts, width]; a part a CTA
    int rows, width, accumulate;
    float offset;
};
