"""Operations of recurrent layers: short convolutions, Mamba2, and the gated delta rule."""
