"""The colours of charts: Okabe and Ito's, which people of all kinds of colour vision can tell apart."""

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
