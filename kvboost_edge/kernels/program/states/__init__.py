"""Operations of recurrent layers: short convolutions, Mamba2, gated delta rule."""
