"""How transformers renames and fuses the tensors of a model's files while it loads them: a table.

One paragraph a family: its names (``model_type``, or a class), then one change a line, from the
name in a file to the name in memory, both as `ckptsync.layouts.weight_renaming` reads them:

    PATTERN => NAME                 the first match of a regular expression is replaced
    x.*.w.weight => x.fused         ``*`` is an expert's number: all are one tensor, number first
    {q,k,v}.weight => qkv.weight    several tensors of a file are one in memory, in this order
    qkv.weight => {q,k,v}.weight    one tensor of a file is several in memory
    PATTERN => NAME ^T              the file has the last two axes swapped, unless its shape is that
                                    in memory
    as FAMILY                       the changes of another family

Source: ``conversion_mapping.py`` of transformers 5.24, without the families whose files hold
elements in another order (rotary halves, interleaved gates), and without those that are not
trained as language models.  `tests/campaigns/names_of.py` compares it with ``save_pretrained``.
"""

FAMILIES = r"""
# GPTNeoXForCausalLM
^embed_out\. => lm_head.

# llava aria paligemma aya_vision got_ocr2 gemma3 internvl vipllava mistral3 pp_chart2table
^language_model.lm_head => lm_head
^language_model.model => model.language_model
^language_model => model.language_model
^vision_tower => model.vision_tower
^multi_modal_projector => model.multi_modal_projector

# qwen2_audio voxtral voxtral_realtime audioflamingo3 glmasr musicflamingo
^language_model.lm_head => lm_head
^language_model.model => model.language_model
^language_model => model.language_model
^audio_tower => model.audio_tower
^multi_modal_projector => model.multi_modal_projector

# granite_speech granite_speech_plus
^language_model.lm_head => lm_head
^language_model.model => model.language_model
^language_model => model.language_model
^encoder => model.encoder
^projector => model.projector

# llava_next llava_next_video llava_onevision
^language_model.lm_head => lm_head
^language_model.model => model.language_model
^language_model => model.language_model
^vision_tower => model.vision_tower
^multi_modal_projector => model.multi_modal_projector
^image_newline => model.image_newline

# video_llava
^language_model.lm_head => lm_head
^language_model.model => model.language_model
^language_model => model.language_model
^image_tower => model.image_tower
^video_tower => model.video_tower
^multi_modal_projector => model.multi_modal_projector

# fuyu
^language_model.lm_head => lm_head
^language_model.model => model.language_model
^language_model => model.language_model
^vision_embed_tokens => model.vision_embed_tokens

# mllama
^language_model.lm_head => lm_head
^language_model.model => model.language_model
^language_model => model.language_model
^vision_model => model.vision_model
^multi_modal_projector => model.multi_modal_projector

# emu3
^text_model.lm_head => lm_head
^text_model.model => model.text_model
^text_model => model.text_model
^vqmodel => model.vqmodel

# paddleocr_vl
^mlp_AR => model.projector
^visual => model.visual
^model(?!(\.visual|\.projector|\.language_model)) => model.language_model

# Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration
^visual => model.visual
^model(?!\.(language_model|visual)) => model.language_model

# Qwen2_5OmniThinkerForConditionalGeneration qwen2_5_omni_thinker
# Qwen3OmniMoeThinkerForConditionalGeneration
^thinker\.(.+) => \1
^audio_tower => model.audio_tower
^visual => model.visual
^model(?!\.(language_model|visual|audio_tower)) => model.language_model

# deepseek_v4
\.attn\. => .self_attn.
\.ffn\. => .mlp.
\.indexer\.compressor\. => .compressor.indexer.
^embed\.weight => embed_tokens.weight
^head\.weight => lm_head.weight
^hc_head_fn => hc_head.hc_fn
^hc_head_base => hc_head.hc_base
^hc_head_scale => hc_head.hc_scale
\.attn_norm\. => .input_layernorm.
\.ffn_norm\. => .post_attention_layernorm.
\.hc_attn_fn => .attn_hc.fn
\.hc_attn_base => .attn_hc.base
\.hc_attn_scale => .attn_hc.scale
\.hc_ffn_fn => .ffn_hc.fn
\.hc_ffn_base => .ffn_hc.base
\.hc_ffn_scale => .ffn_hc.scale
\.attn_sink => .sinks
\.indexer\.weights_proj\. => .compressor.indexer.scorer.weights_proj.
\.indexer\.wq_b\. => .compressor.indexer.q_b_proj.
(?<!^model)\.norm\. => .kv_norm.
\.ape => .position_bias
\.wq_a\. => .q_a_proj.
\.self_attn\.wq_b\. => .self_attn.q_b_proj.
\.wkv\. => .kv_proj.
\.wgate\. => .gate_proj.
\.wo_a\. => .o_a_proj.
\.wo_b\. => .o_b_proj.
\.q_norm\. => .q_a_norm.
\.gate\.bias => .gate.e_score_correction_bias
\.shared_experts\.w1\. => .shared_experts.gate_proj.
\.shared_experts\.w2\. => .shared_experts.down_proj.
\.shared_experts\.w3\. => .shared_experts.up_proj.
\.experts.*.w{1,3}.weight => .experts.gate_up_proj
\.experts.*.w2.weight => .experts.down_proj

# glm5_next glm5_next_text
self_attn\.f_a_proj\. => self_attn.forget_gate.f_a_proj.
self_attn\.f_b_proj\. => self_attn.forget_gate.f_b_proj.
self_attn\.dt_bias => self_attn.forget_gate.dt_bias
self_attn\.A_log => self_attn.forget_gate.A_log
hc_attn_fn => attn_hc.fn
hc_attn_base => attn_hc.base
hc_attn_scale => attn_hc.scale
hc_ffn_fn => ffn_hc.fn
hc_ffn_base => ffn_hc.base
hc_ffn_scale => ffn_hc.scale
mlp.experts.*.{gate,up}_proj.weight => mlp.experts.gate_up_proj
mlp.experts.*.down_proj.weight => mlp.experts.down_proj
self_attn.{q,k,v}_conv1d.weight => self_attn.conv1d.weight

# minimax_m3_vl
^language_model\.lm_head => lm_head
^language_model\.model\. => model.language_model.
^vision_tower\.vision_model\.embeddings\.patch_embedding\. => model.vision_tower.embeddings.proj.
^vision_tower\.vision_model\.encoder\.layers\. => model.vision_tower.layers.
^vision_tower\.vision_model\.pre_layrnorm\. => model.vision_tower.pre_layrnorm.
^multi_modal_projector\.linear_1\. => model.multi_modal_projector.linear_1.
^multi_modal_projector\.linear_2\. => model.multi_modal_projector.linear_2.
^patch_merge_mlp\.linear_1\. => model.multi_modal_projector.merge_linear_1.
^patch_merge_mlp\.linear_2\. => model.multi_modal_projector.merge_linear_2.
\.block_sparse_moe\.(experts|gate|shared_experts)\. => .mlp.\1.
\.block_sparse_moe\.e_score_correction_bias => .mlp.gate.e_score_correction_bias
\.self_attn\.index_q_proj\. => .self_attn.indexer.q_proj.
\.self_attn\.index_k_proj\. => .self_attn.indexer.k_proj.
\.self_attn\.index_q_norm\. => .self_attn.indexer.q_norm.
\.self_attn\.index_k_norm\. => .self_attn.indexer.k_norm.
\.experts.*.w{1,3}.weight => .experts.gate_up_proj
\.experts.*.w2.weight => .experts.down_proj
\.{gate,up}_proj.weight => .gate_up_proj.weight

# aria_text
mlp\.experts\.fc1\.weight => mlp.experts.gate_up_proj
mlp\.experts\.fc2\.weight => mlp.experts.down_proj

# granitemoe granitemoeshared granitemoehybrid
block_sparse_moe\.input_linear\.weight => block_sparse_moe.experts.gate_up_proj
block_sparse_moe\.output_linear\.weight => block_sparse_moe.experts.down_proj
block_sparse_moe\.router\.layer\.weight => block_sparse_moe.router.weight

# vibevoice_asr
^language_model.lm_head => lm_head
^language_model.model => model.language_model
^language_model => model.language_model
^acoustic_tokenizer_encoder => model.acoustic_tokenizer_encoder
^semantic_tokenizer_encoder => model.semantic_tokenizer_encoder
^multi_modal_projector => model.multi_modal_projector

# CLIPVisionModel AltCLIPVisionModel ChineseCLIPVisionModel CLIPSegVisionModel
# MetaClip2VisionModel mlcd_vision mlcd SiglipVisionModel Siglip2VisionModel
# xCLIPVisionModel clip_vision_model siglip_vision_model siglip2_vision_model
# metaclip_2_vision_model
^vision_model\.(.+) => \1

# CLIPTextModel CLIPSegTextModel MetaClip2TextModel SiglipTextModel Siglip2TextModel
# xCLIPTextModel clip_text_model siglip_text_model siglip2_text_model
^text_model\.(.+) => \1

# colqwen2
^vlm\.model\.(.+) => vlm.\1

# shieldgemma2
^model\.(?:(?!model\.))(.+) => model.model.\1

# olmo_hybrid
attention_layer_norm => input_layernorm
feedforward_layer_norm => post_attention_layernorm
linear_attn.{q,k,v}_conv1d.weight => linear_attn.conv1d.weight

# exaone
^transformer\.wte\. => model.embed_tokens.
^transformer\.h\. => model.layers.
^transformer\.ln_f\. => model.norm.
\.attn\.attention\. => .self_attn.
\.self_attn\.out_proj\. => .self_attn.o_proj.
\.ln_1\. => .input_layernorm.
\.ln_2\. => .post_attention_layernorm.
\.mlp\.c_fc_0\. => .mlp.gate_proj.
\.mlp\.c_fc_1\. => .mlp.up_proj.
\.mlp\.c_proj\. => .mlp.down_proj.

# qwen3_5_text apertus1p5_text gemma3n_text
^model\.language_model\.(.+) => model.\1

# mixtral minimax
.block_sparse_moe. => .mlp.
.experts.*.w{1,3}.weight => .experts.gate_up_proj
.experts.*.w2.weight => .experts.down_proj

# qwen2_moe Dots3NoteTextModel afmoe deepseek_v2 deepseek_v3 deepseek_v32 dots1 glm4_moe
# glm4_moe_lite glm_moe_dsa glm4v_moe longcat_flash solar_open mellum qwen3_moe beam
# qwen3_omni_moe qwen3_omni_moe_thinker qwen3_omni_moe_text qwen3_next hunyuan_v1_moe
# flex_olmo olmoe sarvam_mla cohere2_moe UnlimitedOcrTextModel
mlp.experts.*.{gate,up}_proj.weight => mlp.experts.gate_up_proj
mlp.experts.*.down_proj.weight => mlp.experts.down_proj

# qwen3_vl_moe
mlp.experts.gate_up_proj => mlp.experts.gate_up_proj ^T
mlp.experts.down_proj => mlp.experts.down_proj ^T

# phimoe
.block_sparse_moe. => .mlp.
.gate.weight => .router.weight
.experts.*.w{1,3}.weight => .experts.gate_up_proj
.experts.*.w2.weight => .experts.down_proj

# lfm2_moe
feed_forward.experts.*.w{1,3}.weight => feed_forward.experts.gate_up_proj
feed_forward.experts.*.w2.weight => feed_forward.experts.down_proj

# lfm3
\.self_attn\.gate_proj\. => .self_attn.g_proj.

# nemotron_h
backbone. => model.
mixer.experts.*.up_proj.weight => mixer.experts.up_proj
mixer.experts.*.down_proj.weight => mixer.experts.down_proj

# jamba
feed_forward.experts.*.{gate,up}_proj.weight => feed_forward.experts.gate_up_proj
feed_forward.experts.*.down_proj.weight => feed_forward.experts.down_proj

# nomic_bert
encoder.layers => layers
emb_ln => embeddings.LayerNorm
attn.out_proj => self_attn.o_proj
fc11 => up_proj
fc12 => gate_proj
fc2 => down_proj
norm1 => post_attention_layernorm
norm2 => post_mlp_layernorm
attn.Wqkv => self_attn.{q,k,v}_proj

# gte
^new\.(.+) => \1
encoder.layer => layers
attention.o_proj => self_attn.o_proj
attn_ln => post_attention_layernorm
mlp_ln => post_mlp_layernorm
lm_head.norm => lm_head.layer_norm
attention.qkv_proj => self_attn.{q,k,v}_proj
mlp.up_gate_proj => mlp.{up,gate}_proj

# jina_embeddings_v3
emb_ln => embeddings.LayerNorm
encoder.layers => layers
mixer.out_proj => self_attn.o_proj
norm1 => post_attention_layernorm
norm2 => post_mlp_layernorm
mixer.Wqkv => self_attn.{q,k,v}_proj

# bailing_hybrid
as qwen2_moe
^model\.word_embeddings\. => model.embed_tokens.
\.attention\. => .self_attn.
self_attn\.f_proj\. => self_attn.forget_gate.f_proj.
self_attn\.dt_bias => self_attn.forget_gate.dt_bias
self_attn\.A_log => self_attn.forget_gate.A_log
{q,k,v}_conv1d.weight => conv1d.weight
\.self_attn\.dense\. => .self_attn.o_proj.
\.mlp\.gate\.expert_bias => .mlp.gate.e_score_correction_bias

# sarvam_moe
as qwen2_moe
^model\.word_embeddings\. => model.embed_tokens.
\.attention\. => .self_attn.
query_key_value => {q,k,v}_proj
\.self_attn\.dense\. => .self_attn.o_proj.
\.self_attn\.query_layernorm\. => .self_attn.q_norm.
\.self_attn\.key_layernorm\. => .self_attn.k_norm.
\.mlp\.gate\.expert_bias => .mlp.gate.e_score_correction_bias

# ernie4_5_moe
as qwen2_moe
mlp.moe_statics.e_score_correction_bias => mlp.gate.moe_statics.e_score_correction_bias

# minimax_m2
.block_sparse_moe. => .mlp.
.experts.*.w{1,3}.weight => .experts.gate_up_proj
.experts.*.w2.weight => .experts.down_proj
.block_sparse_moe.e_score_correction_bias => .mlp.e_score_correction_bias

# exaone_moe
as qwen2_moe
mlp.e_score_correction_bias => mlp.gate.e_score_correction_bias

# mimo_v2_flash
as qwen2_moe
self_attn.attention_sink_bias => self_attn.sinks

# hy_v3
as qwen2_moe
mlp\.router\.gate\.weight => mlp.gate.weight
mlp\.expert_bias => mlp.e_score_correction_bias
mlp\.shared_mlp\. => mlp.shared_experts.

# laguna
as qwen2_moe
mlp.experts.e_score_correction_bias => mlp.gate.e_score_correction_bias
mlp.shared_expert. => mlp.shared_experts.

# kimi_linear
self_attn\.f_a_proj\. => self_attn.forget_gate.f_a_proj.
self_attn\.f_b_proj\. => self_attn.forget_gate.f_b_proj.
self_attn\.dt_bias => self_attn.forget_gate.dt_bias
self_attn\.A_log => self_attn.forget_gate.A_log
self_attn.{q,k,v}_conv1d.weight => self_attn.conv1d.weight
\.block_sparse_moe\. => .mlp.
\.experts.*.w{1,3}.weight => .experts.gate_up_proj
\.experts.*.w2.weight => .experts.down_proj

# hunyuan_vl
mlp.dense_h_to_4h => mlp.fc1
mlp.dense_4h_to_h => mlp.fc2
^vit\.layers\.(\d+)\.input_layernorm\. => vit.layers.\1.layer_norm1.
^vit\.layers\.(\d+)\.post_attention_layernorm\. => vit.layers.\1.layer_norm2.
perceive\.proj\.0\. => perceive.proj_conv.
perceive\.proj\.2\. => perceive.proj_out.
perceive\. => patch_merger.
^model(?!\.(language_model|vit|vision_tower)) => model.language_model
^model\.vit => model.vision_tower
^vit => model.vision_tower

# hyperclovax_vision_v2
^model.language_model.lm_head => lm_head
^model.vision_projector => model.projector
^model.language_model\.model\.(.+) => model.language_model.\1

# qwen3_5_moe_text
^model\.language_model\.(.+) => model.\1
mlp.experts.*.{gate,up}_proj.weight => mlp.experts.gate_up_proj
mlp.experts.*.down_proj.weight => mlp.experts.down_proj

# axk1
as qwen2_moe
post_mlp_layernorm => mlp.post_mlp_layernorm

# axk2
as qwen2_moe
W_down => mlp.fc1
W_up => mlp.fc2
self_attn\.q_b_proj\. => self_attn.q_gate_proj.

# kolibri1
as qwen2_moe
moe.router.expert_bias => mlp.gate.e_score_correction_bias
post_attn_norm => post_self_attn_layernorm
post_ffn_norm => post_mlp_layernorm

# flint
as qwen2_moe
self_attn.softmax_offset => self_attn.sinks

# hrm_text
mlp.gate_up_proj.weight => mlp.{gate,up}_proj.weight
attn.gqkv_proj.weight => self_attn.{gate,q,k,v}_proj.weight
\.attn\.o_proj\. => .self_attn.o_proj.

# every
LayerNorm\.gamma$ => LayerNorm.weight
LayerNorm\.beta$ => LayerNorm.bias
\.weight_g$ => .parametrizations.weight.original0
\.weight_v$ => .parametrizations.weight.original1
^model\.language_model\.model => model.language_model
^language_model\.model\.model => model.language_model
"""
