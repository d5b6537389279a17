from celery import shared_task


@shared_task(name="nodes.tasks.reconcile", ignore_result=True)
def reconcile() -> None:
    pass
