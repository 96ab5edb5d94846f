# What the product imports of transformers, for the type checker alone. It reads these modules; for a name of the real
# package's __init__ it would read the 450 families of models, which took two fifths of its time.
from transformers.configuration_utils import PretrainedConfig as PretrainedConfig
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config as DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2ForCausalLM as DeepseekV2ForCausalLM,
)
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config as DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3ForCausalLM as DeepseekV3ForCausalLM,
)
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig as Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM as Gemma3ForCausalLM
from transformers.models.glm4.configuration_glm4 import Glm4Config as Glm4Config
from transformers.models.glm4.modeling_glm4 import Glm4ForCausalLM as Glm4ForCausalLM
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig as Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeForCausalLM as Glm4MoeForCausalLM
from transformers.models.glm4_moe_lite.configuration_glm4_moe_lite import (
    Glm4MoeLiteConfig as Glm4MoeLiteConfig,
)
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import (
    Glm4MoeLiteForCausalLM as Glm4MoeLiteForCausalLM,
)
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig as GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM as GptOssForCausalLM
from transformers.models.llama.configuration_llama import LlamaConfig as LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM as LlamaForCausalLM
from transformers.models.mistral.configuration_mistral import MistralConfig as MistralConfig
from transformers.models.mistral.modeling_mistral import MistralForCausalLM as MistralForCausalLM
from transformers.models.mixtral.configuration_mixtral import MixtralConfig as MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM as MixtralForCausalLM
from transformers.models.olmo2.configuration_olmo2 import Olmo2Config as Olmo2Config
from transformers.models.olmo2.modeling_olmo2 import Olmo2ForCausalLM as Olmo2ForCausalLM
from transformers.models.olmo3.configuration_olmo3 import Olmo3Config as Olmo3Config
from transformers.models.olmo3.modeling_olmo3 import Olmo3ForCausalLM as Olmo3ForCausalLM
from transformers.models.phi3.configuration_phi3 import Phi3Config as Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3ForCausalLM as Phi3ForCausalLM
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config as Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM as Qwen2ForCausalLM
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config as Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM as Qwen3ForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig as Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM as Qwen3_5ForCausalLM
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import (
    Qwen3_5MoeTextConfig as Qwen3_5MoeTextConfig,
)
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeForCausalLM as Qwen3_5MoeForCausalLM,
)
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig as Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM as Qwen3MoeForCausalLM
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig as Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextForCausalLM as Qwen3NextForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
