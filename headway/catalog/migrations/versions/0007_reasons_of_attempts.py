"""Why an attempt waits, the code of the reason for which it ended, and what follows from that."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("waiting", "reason_code", "retry"):
        op.add_column("run_attempt", sa.Column(name, sa.Text, nullable=True))
